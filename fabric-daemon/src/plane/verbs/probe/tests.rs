use super::super::rails;
use super::*;

#[test]
fn ports_agree_on_modes_and_never_on_laxer_ones() {
    let both = || vec![Mode::Window, Mode::Lane];
    let (window, lane) = (|| vec![Mode::Window], || vec![Mode::Lane]);
    let agree = |tried: &[Vec<Mode>], wanted: &[Mode]| {
        agree((0..).zip(tried.iter().cloned()).collect(), wanted)
    };
    let all = agree(&[both(), both()], &both());
    assert_eq!(all, (vec![0, 1], vec![], both()));
    let some = agree(&[lane(), both(), window(), vec![]], &both());
    assert_eq!(some, (vec![1, 2], vec![0, 3], window()));
    let reversed = [Mode::Lane, Mode::Window];
    let some = agree(&[lane(), both(), window()], &reversed);
    assert_eq!(some, (vec![0, 1], vec![2], lane()));
    let second = agree(&[lane(), vec![]], &both());
    assert_eq!(second, (vec![0], vec![1], lane()));
    let none = agree(&[vec![], vec![]], &both());
    assert_eq!(none, (vec![], vec![0, 1], vec![]));
}

fn rail() -> Rail {
    let mut rails = rails::discover(&[]).unwrap();
    rails.pop().expect("a device")
}

/// A pair, and a window that is bound to the first area. In this order, so that the window goes
/// first.
fn bound(bench: &Bench<'_>) -> (Pair, MemoryWindow, RKey) {
    let mut pair = bench.pair().unwrap();
    let mut window = MemoryWindow::new(&bench.domain).unwrap();
    let rkey = bench.bind(&mut pair.owner, &mut window, area(0)).unwrap();
    (pair, window, rkey)
}

fn refusal(outcome: Result<(), Refusal>) -> (Step, Fault) {
    let Refusal { step, fault } = outcome.expect_err("it must be refused");
    (step, fault)
}

#[test]
#[ignore = "needs an RDMA device: tests/rdma/run"]
fn a_device_that_keeps_the_rules_is_used_in_every_mode() {
    let modes = [Mode::Window, Mode::Pull, Mode::Lane];
    let began = Instant::now();
    let proven = prove(rails::discover(&[]).unwrap(), &modes);
    println!("the probe took {:?}", began.elapsed());
    assert_eq!(proven.refused, [""; 0]);
    assert_eq!(proven.modes, modes);
    assert_eq!(proven.rails.len(), rails::discover(&[]).unwrap().len());
}

/// Fences of a test, which keeps what they should have destroyed: windows before queue pairs.
#[derive(Default)]
struct Kept {
    windows: Vec<MemoryWindow>,
    queue_pairs: Vec<QueuePair>,
}

#[test]
#[ignore = "needs an RDMA device: tests/rdma/run"]
fn a_fence_that_does_nothing_is_caught() {
    let rail = rail();
    for mode in [Mode::Window, Mode::Lane, Mode::Pull] {
        let bench = Bench::new(&rail, mode).unwrap();
        let mut kept = Kept::default();
        let outcome = bench.try_fence(&mut |queue_pair, windows| {
            kept.windows.extend(windows);
            kept.queue_pairs.push(queue_pair);
            Ok(())
        });
        assert!(matches!(outcome, Err(Fault::Changed)), "{outcome:?}");
    }
}

/// Soft-RoCE reads within the call that posts, so there nothing is left for a fence to end.
/// That a byte which lands after it would be seen is shown by one that this test changes.
#[test]
#[ignore = "needs an RDMA device: tests/rdma/run"]
fn a_byte_that_a_read_brings_after_the_fence_is_caught() {
    let rail = rail();
    let bench = Bench::new(&rail, Mode::Pull).unwrap();
    let mut late = Vec::new();
    let outcome = bench.try_fence_of_reads(&mut |queue_pair, windows| {
        let memory = Arc::clone(&bench.memory);
        late.push(thread::spawn(move || {
            thread::sleep(SETTLE / 4);
            memory.memory.mapped().write(area(1), &[0; 8]).unwrap();
        }));
        lanes::fence(queue_pair, windows)
    });
    assert!(matches!(outcome, Err(Fault::Changed)), "{outcome:?}");
    late.into_iter().for_each(|late| late.join().unwrap());
}

/// A single packet that lands after the fence, now and then, is seen.
#[test]
#[ignore = "needs an RDMA device: tests/rdma/run"]
fn a_fence_without_its_barrier_is_caught() {
    let rail = rail();
    let bench = Bench::new(&rail, Mode::Lane).unwrap();
    let caught = (1..=200).find(|_| {
        let mut kept = Kept::default();
        let outcome = bench.try_fence(&mut |queue_pair, _none| {
            let stopped = queue_pair.stop();
            kept.queue_pairs.push(queue_pair);
            stopped
        });
        matches!(outcome, Err(Fault::Changed))
    });
    println!("caught by probe number {caught:?}");
    assert!(caught.is_some());
}

#[test]
#[ignore = "needs an RDMA device: tests/rdma/run"]
fn a_fence_that_fails_or_takes_too_long_is_caught() {
    let rail = rail();
    let mut bench = Bench::new(&rail, Mode::Window).unwrap();
    let error = VerbsError {
        call: "ibv_destroy_qp",
        code: 16,
    };
    let outcome = bench.try_fence(&mut |queue_pair, windows| {
        lanes::fence(queue_pair, windows)?;
        Err(error)
    });
    assert!(
        matches!(outcome, Err(Fault::Verbs(got)) if got == error),
        "{outcome:?}"
    );
    bench.time_limit = Duration::from_secs(1);
    let outcome = bench.try_fence(&mut |queue_pair, windows| {
        thread::sleep(Duration::from_millis(1100));
        lanes::fence(queue_pair, windows)
    });
    assert!(matches!(outcome, Err(Fault::Late(_))), "{outcome:?}");
}

#[test]
#[ignore = "needs an RDMA device: tests/rdma/run"]
fn a_device_that_binds_no_windows_is_refused_for_them() {
    let rail = rail();
    // The region does not allow it: as for whoever cannot do it.
    for mode in [Mode::Window, Mode::Pull] {
        let bench = Bench::with(&rail, mode, Rights::new(&[])).unwrap();
        let (step, fault) = refusal(bench.try_windows());
        assert_eq!(step, Step::Bind, "{fault}");
    }
}

#[test]
#[ignore = "needs an RDMA device: tests/rdma/run"]
fn a_pool_that_its_own_key_opens_is_refused_for_windows() {
    let rail = rail();
    let rights = Rights::new(&[Mode::Window, Mode::Lane]);
    let bench = Bench::with(&rail, Mode::Window, rights).unwrap();
    let (step, fault) = refusal(bench.try_windows());
    assert_eq!(step, Step::PoolKey, "{fault}");
    assert!(matches!(fault, Fault::Accepted), "{fault}");
}

#[test]
#[ignore = "needs an RDMA device: tests/rdma/run"]
fn a_message_that_is_told_as_another_is_caught() {
    let rail = rail();
    let bench = Bench::new(&rail, Mode::Window).unwrap();
    let (mut pair, mut window, rkey) = bound(&bench);
    // A plain message where an invalidation should be, and the other way round.
    let mut chain = SendChain::new();
    chain.send_empty(MESSAGE, Signal::Yes);
    let want = Opcode::ReceiveInvalidate(rkey);
    let fault = pair.message(&mut chain, want).unwrap_err();
    let got = Opcode::Receive;
    let is_so = |fault: &Fault, pair| {
        let Fault::Told { got, want } = fault else {
            return false;
        };
        (*got, *want) == pair
    };
    assert!(is_so(&fault, (got, want)), "{fault}");
    pair.writer.told(Opcode::Send).unwrap();
    chain.send_invalidate(MESSAGE, Signal::Yes, rkey);
    let fault = pair.message(&mut chain, got).unwrap_err();
    assert!(is_so(&fault, (want, got)), "{fault}");
    pair.writer.told(Opcode::Send).unwrap();
    // And one of another key than was told.
    let next = bench.bind(&mut pair.owner, &mut window, area(0)).unwrap();
    chain.send_invalidate(MESSAGE, Signal::Yes, next);
    let fault = pair.message(&mut chain, want).unwrap_err();
    let got = Opcode::ReceiveInvalidate(next);
    assert!(is_so(&fault, (got, want)), "{fault}");
}

#[test]
#[ignore = "needs an RDMA device: tests/rdma/run"]
fn a_write_that_lands_where_it_must_not_is_caught() {
    let rail = rail();
    let bench = Bench::new(&rail, Mode::Window).unwrap();
    let (mut pair, _window, rkey) = bound(&bench);
    let fault = bench.refused(&mut pair, 0, area(0), rkey).unwrap_err();
    assert!(matches!(fault, Fault::Accepted), "{fault}");
    bench.settled(&[(area(0), 0)]).unwrap();
    for wrong in [&[][..], &[(area(0), 64)], &[(area(1), 0)]] {
        let fault = bench.settled(wrong).unwrap_err();
        assert!(matches!(fault, Fault::Changed), "{fault}");
    }
}

#[test]
#[ignore = "needs an RDMA device: tests/rdma/run"]
fn a_device_that_does_not_answer_is_refused_in_time() {
    let rail = rail();
    let mut bench = Bench::new(&rail, Mode::Window).unwrap();
    bench.time_limit = Duration::from_millis(50);
    let mut pair = bench.pair().unwrap();
    let fault = pair.owner.told(Opcode::Receive).unwrap_err();
    assert!(matches!(fault, Fault::Silent(_)), "{fault}");
    // Nobody takes the write: it is not refused, which would be an answer.
    bench.time_limit = TIME_LIMIT * 4;
    let mut pair = bench.pair().unwrap();
    pair.owner.queue_pair.stop().unwrap();
    let rkey = bench.region.rkey();
    let fault = bench.refused(&mut pair, 0, area(0), rkey).unwrap_err();
    let want = Status::RETRIES_EXCEEDED;
    assert!(
        matches!(fault, Fault::Status(got) if got == want),
        "{fault}"
    );
}
