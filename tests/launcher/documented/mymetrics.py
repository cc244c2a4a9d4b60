"""The documents' metric handler."""

import tenax.metrics as metrics


class MyMetricHandler(metrics.MetricHandler):
    def __init__(self, path):
        self._path = path

    def emit(self, metric_data: metrics.MetricData):
        with open(self._path, "a") as file:
            file.write(f"{metric_data.group_name} {metric_data.name} {metric_data.value}\n")
