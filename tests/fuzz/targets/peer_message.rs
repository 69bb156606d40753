//! libFuzzer's program for the target `peer_message`.

#![no_main]
#![forbid(unsafe_code)]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fabric_fuzz::peer_message(bytes));
