"""What a run leaves for people: figures, tables, and the folder that holds them."""
