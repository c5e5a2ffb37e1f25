"""PADPFL, which weights clients of different data quality and number by impact factors."""
