"""FedAvg without privacy on real data."""
