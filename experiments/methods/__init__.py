"""Well-known personalized methods and server optimizers on a small task."""
