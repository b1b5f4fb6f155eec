"""The machines fidelity: the state machines and policies of the services, driven by a list of events instead of asyncio and gRPC.

It decides as the services do: machines decide, and the driver does what the services' tasks do, in the same order at each time.
"""
