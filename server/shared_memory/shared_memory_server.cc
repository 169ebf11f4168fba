#include "server/shared_memory/shared_memory_server.h"

#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <list>
#include <map>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/helper_threads.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "server/shared_memory/shared_memory.h"
#include "server/shared_memory/shared_memory_offers.h"
#include "server/shared_memory/shared_memory_socket.h"

namespace ballast::server {
namespace {

using Clock = std::chrono::steady_clock;

// Making, clearing and unmapping memory takes seconds for large ranks, so helper threads do it.
// Memory is taken back by threads of its own, because making more may wait for that.
constexpr size_t kMakers = 4;
constexpr size_t kTakers = 2;
// How long no peer is accepted after the process has run out of descriptors.
constexpr auto kPauseWithoutRoom = std::chrono::seconds(1);

// Memory that a rank has.
struct Grant {
  SharedMemoryOffers::Claim claim;
  std::shared_ptr<SharedMemory> memory;
};

bool OfSameRank(const SharedMemoryOffers::Claim& a, const SharedMemoryOffers::Claim& b) {
  // By owner, which can be compared also when the jobs are gone.
  return !a.job.owner_before(b.job) && !b.job.owner_before(a.job) && a.holder.rank == b.holder.rank;
}

// Checked before memory is made, which takes long and is counted; GiveRankMemory checks again.
absl::Status CheckHolder(const Job& job, const RankHolder& holder) {
  const JobStatus status = job.Status();
  const RankProgress& rank = status.ranks[holder.rank];
  if (status.generation != holder.generation || rank.process_id != holder.process_id) {
    return absl::AbortedError(absl::StrCat("rank ", holder.rank, " of job ", job.spec().name,
                                           " is not held by this process; attach again"));
  }
  if (rank.begun) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", holder.rank, " of job ", job.spec().name, " is in the middle of a step"));
  }
  return absl::OkStatus();
}

// Memory that outlives this process, if there is any. Each has a name of its own: an older one of
// the rank may not be gone yet.
struct NamedBy {
  NamedMemory* memory = nullptr;
  std::string instance_id;
};
absl::StatusOr<std::shared_ptr<SharedMemory>> MakeMemory(const Job& job, int rank,
                                                         MemoryBudget::Reservation reservation,
                                                         const NamedBy& named) {
  RankMemoryLayout places(job.layout(), job.spec().groups, rank);
  if (named.memory == nullptr) {
    return SharedMemory::Create(std::move(places), std::move(reservation));
  }
  static std::atomic<uint64_t> last = 0;
  return SharedMemory::CreateNamed(
      std::move(places), std::move(reservation), *named.memory,
      absl::StrCat(job.uid(), "/rank ", rank, " ", named.instance_id, " ", ++last));
}

absl::StatusOr<Grant> MakeGrant(SharedMemoryOffers::Claim claim, const NamedBy& named) {
  const std::shared_ptr<Job> job = claim.job.lock();
  if (job == nullptr) return absl::NotFoundError("the job has been closed");
  const int rank = claim.holder.rank;
  BALLAST_RETURN_IF_ERROR(CheckHolder(*job, claim.holder));
  BALLAST_ASSIGN_OR_RETURN(MemoryBudget::Reservation reservation, job->ReserveRankMemory(rank));
  BALLAST_ASSIGN_OR_RETURN(std::shared_ptr<SharedMemory> memory,
                           MakeMemory(*job, rank, std::move(reservation), named));
  // May wait, too, for a decision and update under way.
  BALLAST_RETURN_IF_ERROR(job->GiveRankMemory(claim.holder, memory));
  return Grant{.claim = std::move(claim), .memory = std::move(memory)};
}

void TakeBack(Grant grant) {
  grant.memory->PeerIsDone();
  if (const std::shared_ptr<Job> job = grant.claim.job.lock()) {
    job->DropRankMemory(grant.claim.holder.rank, grant.memory.get());
  }
}

// What a helper has done for a peer: made its memory, or taken it back (an error).
struct Finished {
  uint64_t peer = 0;
  absl::StatusOr<Grant> grant = absl::CancelledError("");
};
using FinishedList = std::list<Finished>;

// From the helpers to the server's thread. Thread-safe.
class Mailbox {
 public:
  explicit Mailbox(FileDescriptor event) : event_(std::move(event)) {}  // An eventfd.
  const FileDescriptor& event() const { return event_; }  // Readable when something was put in.

  void Put(Finished done) {
    {
      MutexLock lock(mutex_);
      done_.push_back(std::move(done));
    }
    Wake();
  }
  void Stop() {
    {
      MutexLock lock(mutex_);
      stopped_ = true;
    }
    Wake();
  }
  // Adds to `done`. False: the server is to be closed.
  bool Take(FinishedList& done) {
    uint64_t count = 0;
    // Before the list is taken: what is put in after that makes the event readable again.
    while (read(event_.number(), &count, sizeof(count)) < 0 && errno == EINTR) continue;
    MutexLock lock(mutex_);
    done.splice(done.end(), done_);
    return !stopped_;
  }

 private:
  void Wake() {
    const uint64_t one = 1;
    // It could only fail because the count is full, and then the event is readable anyway
    // (eventfd(2)).
    while (write(event_.number(), &one, sizeof(one)) < 0 && errno == EINTR) continue;
  }

  const FileDescriptor event_;
  Mutex mutex_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  FinishedList done_ ABSL_GUARDED_BY(mutex_);
};

// The connections. Used by the server's thread alone.
class Reception {
 public:
  Reception(const SharedMemoryServerLimits& limits, const FileDescriptor& listener,
            SharedMemoryOffers& offers, Mailbox& mailbox, HelperThreads& makers,
            HelperThreads& takers, NamedBy named)
      : limits_(limits),
        named_(std::move(named)),
        listener_(listener),
        offers_(offers),
        mailbox_(mailbox),
        makers_(makers),
        takers_(takers) {}

  // Returns when the mailbox is stopped.
  void Run();

 private:
  struct Peer {
    enum class State : uint8_t {
      kSilent,   // It has shown no token.
      kParked,   // It waits until no other peer has, gets or gives back memory of its rank.
      kWaiting,  // A helper makes its memory.
      kServed,   // It has its memory.
      kLeaving,  // It has disconnected; a helper takes its memory back.
    };
    State state = State::kSilent;
    FileDescriptor connection;
    int process = 0;
    Clock::time_point silent_until;
    SharedMemoryOffers::Claim claim;  // Unless kSilent.
    std::optional<Grant> grant;       // kServed.
  };
  using Peers = std::map<uint64_t, Peer>;  // By number, which is the order of arrival.

  void Round();
  int PollTimeoutMs(Clock::time_point now) const;
  void Accept();
  void OnReadable(uint64_t number);
  void Serve(uint64_t number, const std::string& token);
  std::vector<uint64_t> OthersOfRank(uint64_t number) const;
  void MakeIfAlone(uint64_t number);
  void MakeForParked(const SharedMemoryOffers::Claim& claim);
  void Refuse(uint64_t number, absl::string_view why);
  void Leave(uint64_t number);
  void Finish(Finished done);
  void DropSilent(Clock::time_point now);

  const SharedMemoryServerLimits limits_;
  const NamedBy named_;
  const FileDescriptor& listener_;
  SharedMemoryOffers& offers_;
  Mailbox& mailbox_;
  HelperThreads& makers_;
  HelperThreads& takers_;
  Peers peers_;
  FinishedList finished_;
  uint64_t last_peer_ = 0;
  Clock::time_point closed_until_;
  bool warned_of_no_room_ = false;
};

void Reception::Run() {
  while (mailbox_.Take(finished_)) Round();
}

void Reception::Round() {
  while (!finished_.empty()) {
    Finish(std::move(finished_.front()));
    finished_.pop_front();
  }
  const Clock::time_point now = Clock::now();
  DropSilent(now);
  std::vector<pollfd> waits = {{.fd = mailbox_.event().number(), .events = POLLIN, .revents = 0}};
  std::vector<uint64_t> numbers = {0};
  // While nothing can be accepted the listener would be readable all the time.
  if (now >= closed_until_) {
    waits.push_back({.fd = listener_.number(), .events = POLLIN, .revents = 0});
    numbers.push_back(0);
  }
  for (const auto& [number, peer] : peers_) {
    // The others have a helper, or wait for one. Whether they have gone shows when it is done.
    if (peer.state != Peer::State::kSilent && peer.state != Peer::State::kServed) continue;
    waits.push_back({.fd = peer.connection.number(), .events = POLLIN, .revents = 0});
    numbers.push_back(number);
  }
  if (poll(waits.data(), waits.size(), PollTimeoutMs(now)) < 0) return;
  for (size_t i = 0; i < waits.size(); ++i) {
    if (waits[i].revents == 0) continue;
    if (numbers[i] != 0) OnReadable(numbers[i]);
    if (waits[i].fd == listener_.number()) Accept();
  }
}

// The time until the next silent peer is dropped, or new peers are accepted again.
int Reception::PollTimeoutMs(Clock::time_point now) const {
  Clock::time_point next = Clock::time_point::max();
  if (closed_until_ > now) next = closed_until_;
  for (const auto& [number, peer] : peers_) {
    if (peer.state == Peer::State::kSilent) next = std::min(next, peer.silent_until);
  }
  if (next == Clock::time_point::max()) return -1;
  const auto wait = std::chrono::ceil<std::chrono::milliseconds>(next - now);
  return static_cast<int>(std::clamp<int64_t>(wait.count(), 0, 60'000));
}

void Reception::Accept() {
  constexpr int kAtOnce = 64;  // So that accepted peers are served too.
  for (int i = 0; i < kAtOnce; ++i) {
    FileDescriptor connection;
    const AcceptResult result = AcceptPeer(listener_, connection);
    if (result == AcceptResult::kNoRoom) {
      if (!std::exchange(warned_of_no_room_, true)) {
        spdlog::warn("no file descriptor for a worker that asks for shared memory");
      }
      closed_until_ = Clock::now() + kPauseWithoutRoom;
    }
    if (result != AcceptResult::kAccepted) return;
    warned_of_no_room_ = false;
    if (peers_.size() >= limits_.peers) {
      SendRefusal(connection, "too many connections");
      continue;
    }
    const uint64_t number = ++last_peer_;
    const int process = ProcessOf(connection);
    peers_.emplace(number, Peer{.connection = std::move(connection),
                                .process = process,
                                .silent_until = Clock::now() + limits_.silence,
                                .claim = {},
                                .grant = {}});
    OnReadable(number);  // A correct client has sent its token by now.
  }
}

void Reception::OnReadable(uint64_t number) {
  const auto found = peers_.find(number);
  if (found == peers_.end()) return;  // Dropped in this round.
  const Peer::State state = found->second.state;
  // The same round may also have changed its state.
  if (state != Peer::State::kSilent && state != Peer::State::kServed) return;
  std::string token;
  const Received received = ReceiveToken(found->second.connection, token);
  if (received == Received::kNothing) return;
  // A peer that has its memory sends nothing more: it has disconnected, or broken the protocol.
  if (state == Peer::State::kServed) return Leave(number);
  if (received == Received::kToken) return Serve(number, token);
  Refuse(number, received == Received::kEnd ? "no token was sent" : "the message is not a token");
}

void Reception::Serve(uint64_t number, const std::string& token) {
  std::optional<SharedMemoryOffers::Claim> claim = offers_.Take(token, Clock::now());
  if (!claim) {
    return Refuse(number, "this token is not valid: it was used or replaced, or has expired");
  }
  Peer& peer = peers_.at(number);
  peer.claim = *std::move(claim);
  // A rank has one offer at a time, so this claim is the later one.
  for (const uint64_t other : OthersOfRank(number)) {
    if (peers_.at(other).state == Peer::State::kParked) {
      Refuse(other, "a later worker has attached");
    }
  }
  peer.state = Peer::State::kParked;
  MakeIfAlone(number);
}

std::vector<uint64_t> Reception::OthersOfRank(uint64_t number) const {
  const SharedMemoryOffers::Claim& claim = peers_.at(number).claim;
  std::vector<uint64_t> others;
  for (const auto& [other, peer] : peers_) {
    if (other == number || peer.state == Peer::State::kSilent) continue;
    if (OfSameRank(peer.claim, claim)) others.push_back(other);
  }
  return others;
}

// A rank has one memory at a time, so that a budget with room for one is enough. The new claim's
// attachment has replaced the holders before it.
void Reception::MakeIfAlone(uint64_t number) {
  const std::vector<uint64_t> others = OthersOfRank(number);
  for (const uint64_t other : others) {
    if (peers_.at(other).state == Peer::State::kServed) Leave(other);
  }
  // Those that leave, or whose memory is being made, end in Finish, which comes back here.
  if (!others.empty()) return;
  Peer& peer = peers_.at(number);
  makers_.Run([&mailbox = mailbox_, number, claim = peer.claim, named = named_] {
    mailbox.Put({.peer = number, .grant = MakeGrant(claim, named)});
  });
  peer.state = Peer::State::kWaiting;
}

void Reception::MakeForParked(const SharedMemoryOffers::Claim& claim) {
  for (const auto& [number, peer] : peers_) {  // At most one is parked.
    if (peer.state == Peer::State::kParked && OfSameRank(peer.claim, claim)) {
      return MakeIfAlone(number);
    }
  }
}

// For a peer that has no memory.
void Reception::Refuse(uint64_t number, absl::string_view why) {
  const auto found = peers_.find(number);
  spdlog::debug("no shared memory for process {}: {}", found->second.process, std::string(why));
  SendRefusal(found->second.connection, why);
  peers_.erase(found);
}

void Reception::Leave(uint64_t number) {
  Peer& peer = peers_.at(number);
  spdlog::debug("process {} has given up its shared memory", peer.process);
  takers_.Run([&mailbox = mailbox_, number, grant = *std::exchange(peer.grant, {})]() mutable {
    TakeBack(std::move(grant));
    mailbox.Put({.peer = number});
  });
  peer.state = Peer::State::kLeaving;
  peer.connection = FileDescriptor();
}

void Reception::Finish(Finished done) {
  const uint64_t number = done.peer;
  // While a helper works for a peer, the peer is erased nowhere but here.
  Peer& peer = peers_.at(number);
  const SharedMemoryOffers::Claim claim = peer.claim;
  if (peer.state == Peer::State::kLeaving) {
    peers_.erase(number);
  } else if (!done.grant.ok()) {
    const std::string why(done.grant.status().message());
    spdlog::warn("no shared memory for rank {}, process {}: {}", claim.holder.rank, peer.process,
                 why);
    Refuse(number, why);
  } else {
    peer.state = Peer::State::kServed;
    peer.grant = *std::move(done.grant);
    spdlog::debug("process {} shares memory for rank {}", peer.process, claim.holder.rank);
    // The peer may have gone while its memory was made.
    if (!SendGrant(peer.connection, peer.grant->memory->file_descriptor())) Leave(number);
  }
  MakeForParked(claim);
}

void Reception::DropSilent(Clock::time_point now) {
  // Collected first, because Refuse erases from peers_.
  std::vector<uint64_t> late;
  for (const auto& [number, peer] : peers_) {
    if (peer.state == Peer::State::kSilent && peer.silent_until <= now) late.push_back(number);
  }
  for (const uint64_t number : late) Refuse(number, "no token was sent in time");
}

}  // namespace

struct SharedMemoryServer::Impl {
  Impl(const SharedMemoryServerLimits& limits, std::string name, FileDescriptor socket,
       FileDescriptor event, NamedBy named)
      : socket_name(std::move(name)),
        listener(std::move(socket)),
        offers(limits.offers, limits.offer),
        mailbox(std::move(event)),
        makers(kMakers),
        takers(kTakers),
        thread([this, limits, named = std::move(named)] {
          Reception(limits, listener, offers, mailbox, makers, takers, named).Run();
        }) {}
  ~Impl() {
    mailbox.Stop();
    thread.join();
  }

  const std::string socket_name;
  const FileDescriptor listener;
  SharedMemoryOffers offers;
  Mailbox mailbox;
  HelperThreads makers;  // Both sets of threads end before the mailbox does.
  HelperThreads takers;
  std::thread thread;
};

absl::StatusOr<std::unique_ptr<SharedMemoryServer>> SharedMemoryServer::Open(
    const std::string& instance_id, const SharedMemoryServerLimits& limits,
    NamedMemory* named_memory) {
  // An engine may have several servers.
  std::random_device random;
  const std::string name = absl::StrCat("ballast-", instance_id, "-", absl::Hex(random()));
  BALLAST_ASSIGN_OR_RETURN(FileDescriptor listener, ListenOnAbstractSocket(name));
  FileDescriptor event(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!event) return absl::UnavailableError(absl::StrCat("eventfd: ", std::strerror(errno)));
  return std::unique_ptr<SharedMemoryServer>(new SharedMemoryServer(
      std::make_unique<Impl>(limits, name, std::move(listener), std::move(event),
                             NamedBy{.memory = named_memory, .instance_id = instance_id})));
}

SharedMemoryServer::SharedMemoryServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

SharedMemoryServer::~SharedMemoryServer() = default;

std::optional<v1::SharedMemoryOffer> SharedMemoryServer::Offer(const std::shared_ptr<Job>& job,
                                                               RankHolder holder) {
  if (job->layout().chunks_of_rank(holder.rank).empty()) return std::nullopt;
  std::optional<std::string> token = impl_->offers.Add(job, std::move(holder), Clock::now());
  if (!token) return std::nullopt;
  v1::SharedMemoryOffer offer;
  offer.set_socket(impl_->socket_name);
  offer.set_token(*std::move(token));
  return offer;
}

}  // namespace ballast::server
