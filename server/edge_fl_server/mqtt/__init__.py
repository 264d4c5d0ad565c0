"""The server's MQTT side: its connection, the known devices, round requests, and validation of reports."""
