"""The documents' event handler and metric handler, each configured in a custom launcher as printed there."""

import sys

import tenax.events as events
import tenax.metrics as metrics
from tenax.agent.server import WorkerSpec
from tenax.agent.server.local_elastic_agent import LocalElasticAgent


class MyEventHandler(events.EventHandler):
    def record(self, event: events.Event):
        sys.stdout.write(f"event {event.name} {event.source.name}\n")  # each handler has a thread: lines in one piece


class MyMetricHandler(metrics.MetricHandler):
    def emit(self, metric_data: metrics.MetricData):
        sys.stdout.write(f"metric {metric_data.name}\n")


def main():
    events.configure(MyEventHandler())
    metrics.configure(MyMetricHandler())

    spec = WorkerSpec(role="trainer", local_world_size=1, entrypoint="/bin/true", rdzv_handler=None)
    agent = LocalElasticAgent(spec)
    agent.run()


if __name__ == "__main__":
    sys.exit(main())
