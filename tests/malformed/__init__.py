"""Wrong values of every kind, and what each argument of a public function may take of them."""
