"""The two backends: `tf_data` and `dali`, each with a `build` of the same signature."""
