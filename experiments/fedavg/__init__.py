"""FedAvg on real data: does the simulator learn what it should?"""
