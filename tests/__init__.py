"""Tests of Peri; a package so that the doubles can be imported and run with -m."""
