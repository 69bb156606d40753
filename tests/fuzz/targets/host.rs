//! libFuzzer's program for the target `host`.

#![no_main]
#![forbid(unsafe_code)]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fabric_fuzz::host(bytes));
