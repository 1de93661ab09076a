"""Elastic training: a run goes on with the processes left when one dies, hangs or slows down."""
