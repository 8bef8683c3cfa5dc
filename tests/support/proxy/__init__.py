"""The fault proxy between clients and servers, and the verdicts that it acts on.

``fault_proxy`` passes frames, ``verdicts`` names the faults.
"""
