//! libFuzzer's program for the target `frames`.

#![no_main]
#![forbid(unsafe_code)]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fabric_fuzz::frames(bytes));
