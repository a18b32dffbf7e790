"""Policies found by measuring: as accurate as is asked, and never slower than float32."""
