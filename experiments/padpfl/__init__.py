"""PADPFL: clients whose data differ in quality and number, weighted by impact factors."""
