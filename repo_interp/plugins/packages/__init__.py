"""Pretrained models inside packages of PyPI."""
