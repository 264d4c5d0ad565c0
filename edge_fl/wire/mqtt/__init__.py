"""MQTT 5 transport over paho-mqtt: connection, outgoing queue, TLS, reconnect loop."""
