"""The HTTP server: connections, routes, answers as they are written, and the life of the process."""
