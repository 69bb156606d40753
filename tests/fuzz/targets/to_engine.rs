//! libFuzzer's program for the target `to_engine`.

#![no_main]
#![forbid(unsafe_code)]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fabric_fuzz::to_engine(bytes));
