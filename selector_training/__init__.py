"""Training of selectors from probe pools."""
