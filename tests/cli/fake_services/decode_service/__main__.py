from fake_service import main

main("baton.v1.Inference")
