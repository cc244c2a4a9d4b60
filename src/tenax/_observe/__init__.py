"""What is opened so that people can watch a run: dashboard, metrics page, traces, health checks, hang sampling."""
