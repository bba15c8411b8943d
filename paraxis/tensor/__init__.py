"""The sharded tensor, its operators outside of graphs, and what is known of a parameter."""
