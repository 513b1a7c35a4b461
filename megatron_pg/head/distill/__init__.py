"""The divergence of each row from a teacher, over the whole vocabulary or the teacher's top k."""
