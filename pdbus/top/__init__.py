"""What an operator watches: a cluster's figures over the last seconds (`figures`), and the screen that shows them."""
