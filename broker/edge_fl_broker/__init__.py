"""The MQTT broker: finds mosquitto, renders its configuration and runs it."""
