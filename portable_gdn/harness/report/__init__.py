"""A comparison as one page to look at: no network, light and dark."""
