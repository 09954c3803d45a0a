"""Adapters that requests may name.

uploaded_adapters  what clients have sent
served_adapters    what this server offers to everybody
"""
