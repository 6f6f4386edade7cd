"""``perseus-ds …``: one thin module per command."""
