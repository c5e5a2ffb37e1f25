"""Wrong values of every kind, and those that each argument of a public function may accept."""
