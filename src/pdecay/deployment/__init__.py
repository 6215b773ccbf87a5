"""From sparse weights to a model that is smaller and faster."""
