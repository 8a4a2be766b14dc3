"""HTTP: the application, its connections, middleware and endpoints, and the page."""
