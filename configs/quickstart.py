"""placeholder"""
dataset = "stdlib"
