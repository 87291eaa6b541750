"""The description of the API: what each route takes and answers, as OpenAPI and as a page."""
