"""The throw-away project of ``peri demo``: a small shop, with a prompt that is made to be stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Final

DEMO_PROMPT: Final = "rehearse"

_FILES: Final[dict[str, str]] = {
    "README.md": "# Shop\n\nA small cart with price rules. Run the tests with `python -m unittest`.\n",
    "src/cart.py": '''"""A cart."""

VAT = 0.19


class Cart:
    """Items and quantities."""

    def __init__(self):
        self.items = []

    def add(self, name, price, quantity=1):
        self.items.append((name, price, quantity))

    def total(self):
        subtotal = sum(price * quantity for _, price, quantity in self.items)
        if subtotal > 100:
            subtotal *= 0.95
        return round(subtotal * (1 + VAT), 2)
''',
    "src/orders.py": '''"""Orders keep what a cart held when it was paid."""


class Order:
    def __init__(self, cart, customer):
        self.lines = list(cart.items)
        self.customer = customer
        self.total = cart.total()

    def summary(self):
        return f"{self.customer}: {len(self.lines)} lines, {self.total:.2f}"
''',
    "src/stock.py": '''"""What is on the shelves."""


class Stock:
    def __init__(self, counts):
        self.counts = dict(counts)

    def take(self, name, quantity):
        if self.counts.get(name, 0) < quantity:
            raise LookupError(f"not enough {name}")
        self.counts[name] -= quantity
''',
    "tests/test_cart.py": """import sys
import unittest

sys.path.insert(0, "src")
from cart import Cart


class CartTest(unittest.TestCase):
    def test_total(self):
        cart = Cart()
        cart.add("tea", 10.0, 2)
        self.assertEqual(cart.total(), 23.8)


if __name__ == "__main__":
    unittest.main()
""",
}


def make_sample(folder: Path) -> Path:
    """Write the sample project below ``folder`` and return its root."""
    root = folder / "shop"
    for name, text in _FILES.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return root
