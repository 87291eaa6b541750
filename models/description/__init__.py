"""A model's config, as the parts that compute it need it."""
