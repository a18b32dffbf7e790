"""Passes that insert casts in a graph, cast parameters offline, or convert it to float32."""
