"""FedDPA (DynamicPFL): its published setting, and one where client-level privacy can work."""
