"""What a prefix cache is: token blocks and their hashes, who holds which block, and the events that say so."""
