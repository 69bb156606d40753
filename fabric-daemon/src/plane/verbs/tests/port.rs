//! A port that goes away and comes back. The tests are root in a virtual host of their own, where
//! the device sits on `eth0`.

use std::process::Command;
use std::time::Instant;

use super::*;

/// What happens to the port.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Mishap {
    /// It has no address any more: nothing can be sent from it or to it.
    NoAddress,
    /// The link is down.
    NoLink,
}

impl Mishap {
    fn begin(self) -> Ongoing {
        let done = match self {
            Self::NoAddress => ip(&["address", "del", ADDRESS, "dev", "eth0"]),
            Self::NoLink => ip(&["link", "set", "eth0", "down"]),
        };
        assert!(done, "{self:?}");
        Ongoing(self)
    }
}

/// Ends with the value, so that a test which fails leaves the port to the next as it was.
struct Ongoing(Mishap);

impl Drop for Ongoing {
    fn drop(&mut self) {
        let done = match self.0 {
            Mishap::NoAddress => ip(&["address", "add", ADDRESS, "dev", "eth0"]),
            Mishap::NoLink => ip(&["link", "set", "eth0", "up"]),
        };
        assert!(done || thread::panicking(), "{:?}", self.0);
    }
}

fn ip(arguments: &[&str]) -> bool {
    let status = Command::new("ip").args(arguments).status();
    status.is_ok_and(|status| status.success())
}

fn say_what_is() {
    let rails = rails::discover(&[]).unwrap();
    let found = rails.iter().map(|rail| (rail.gid, rail.address.mtu));
    println!("ports: {:?}", found.collect::<Vec<_>>());
}

/// A transfer of many bytes, cut off in its midst by a mishap: both ends come to know.
async fn cut_off(pair: &mut Pair, grant: u64, mishap: Mishap, random: &mut Random) {
    let slots: Vec<u32> = (0..8).collect();
    pair.target.arm(grant, BACK, &slots, &[]);
    pair.target
        .wait(|event| *event == Event::Armed(grant))
        .await;
    pair.source.open(grant, OUT, &slots);
    for _ in 0..16 {
        pair.source.write(grant, testing::run(0, 0, 8));
    }
    pair.source.drain(grant);
    tokio::time::sleep(Duration::from_micros(random.next() % 30_000)).await;
    let _ongoing = mishap.begin();
    say_what_is();
    tokio::time::sleep(Duration::from_millis(random.next() % 1500)).await;
    // As the machine does with a grant that stalls.
    pair.target.fence(grant);
    let by = pair.target.wait_writes_stopped(grant).await;
    let at_proof = pair.target.contents();
    pair.source.stop(grant);
    pair.source.wait_reads_stopped(grant).await;
    println!(
        "{mishap:?}, grant {grant}: {by:?}, {}",
        pair.source.written(grant)
    );
    assert!(pair.target.contents() == at_proof, "a byte after the proof");
    // And one that comes while there is no port.
    pair.target.arm(grant + 1, BACK, &slots, &[]);
    pair.source.open(grant + 1, OUT, &slots);
    pair.source.write(grant + 1, testing::run(0, 0, 8));
    tokio::time::sleep(Duration::from_millis(200)).await;
    pair.target.fence(grant + 1);
    pair.target.wait_writes_stopped(grant + 1).await;
    pair.source.stop(grant + 1);
    pair.source.wait_reads_stopped(grant + 1).await;
}

/// Transfers work again within some time.
async fn recovers(pair: &mut Pair, grants: std::ops::Range<u64>) {
    let slots: Vec<u32> = (0..8).collect();
    let began = Instant::now();
    for grant in grants {
        pair.target.arm(grant, BACK, &slots, &[]);
        pair.source.open(grant, OUT, &slots);
        pair.source.write(grant, testing::run(0, 0, 8));
        pair.source.drain(grant);
        tokio::time::sleep(Duration::from_millis(500)).await;
        pair.target.fence(grant);
        let by = pair.target.wait_writes_stopped(grant).await;
        pair.source.stop(grant);
        pair.source.wait_reads_stopped(grant).await;
        if by == StoppedBy::Drain {
            println!("works again after {:?}", began.elapsed());
            return;
        }
    }
    panic!("no transfer was delivered within {:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn a_port_that_comes_back_is_used_again() {
    let (mut pair, planes) = planes_with(on_one_port(&[Mode::Window]), &Arc::default()).await;
    let mut random = Random::new(51);
    let spec = testing::spec(1, 64 * 1024, 8);
    let source = pair.source.fill(spec, &mut random);
    pair.target.fill(spec, &mut random);
    say_what_is();
    let mishaps = [Mishap::NoLink, Mishap::NoAddress];
    for (round, mishap) in (0..).zip(mishaps.iter().cycle().take(6)) {
        cut_off(&mut pair, round * 100, *mishap, &mut random).await;
        say_what_is();
        recovers(&mut pair, round * 100 + 2..round * 100 + 60).await;
        assert!(pair.target.contents() == source);
        pair.source.log.clear();
        pair.target.log.clear();
        // Four of ours and four of the peer's: what could not be connected is gone.
        for plane in &planes {
            let queue_pairs = plane.objects()[0].1;
            assert!(queue_pairs <= 8, "{queue_pairs}");
        }
    }
}

/// As in `tests/rdma/run`.
const ADDRESS: &str = "10.9.0.1/24";
