"""What a study is: its question, its arms as they are written down, and the words of overrides."""
