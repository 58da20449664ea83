"""False-positive rates of identities that overlap, in comments."""
