"""Simulations of trainings on other hosts: their speed, cost and accuracy."""
