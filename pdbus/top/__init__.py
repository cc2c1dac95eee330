"""The live view of a cluster: its figures over the last seconds (`figures`), and the screen that shows them."""
