#include "gpu_worker/collective/rendezvous.h"

#include <grpcpp/grpcpp.h>
#include <netdb.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <set>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "gpu_worker/collective/rendezvous.grpc.pb.h"
#include "proto/deadline.h"
#include "proto/status.h"

namespace ballast::worker {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMaxValueBytes = 1 << 20;
constexpr std::chrono::seconds kPatience{5};  // A longer wait is reported on stderr.
constexpr std::chrono::seconds kForTheAnswer{5};
// Ranks are started together, and rank 0 may listen a moment later than others connect. gRPC's own
// pauses, from 1 s to 2 min, would be long for that.
constexpr int kFirstReconnectMs = 50;
constexpr int kLastReconnectMs = 500;

bool IsLoopback(absl::string_view host) { return absl::StartsWith(host, "127.") || host == "::1"; }

std::string HostAndPort(const std::string& host, int port) {
  return absl::StrContains(host, ':') ? absl::StrCat("[", host, "]:", port)
                                      : absl::StrCat(host, ":", port);
}

// gRPC writes a peer as ipv4:192.0.2.1:40000 or ipv6:%5B2001:db8::1%5D:40000.
std::string HostOf(absl::string_view peer) {
  peer.remove_prefix(peer.find(':') + 1);
  return absl::StrReplaceAll(peer.substr(0, peer.rfind(':')),
                             {{"%5B", ""}, {"%5D", ""}, {"[", ""}, {"]", ""}});
}

// The first address of `host`, in numbers. gRPC could resolve the name too, but would try until its
// deadline what cannot be resolved.
absl::StatusOr<std::string> Resolve(const std::string& host) {
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), nullptr, nullptr, &found); error != 0) {
    return absl::InvalidArgumentError(absl::StrCat("cannot resolve the host ", host, " (",
                                                   gai_strerror(error), "); check MASTER_ADDR"));
  }
  std::array<char, NI_MAXHOST> address{};
  getnameinfo(found->ai_addr, found->ai_addrlen, address.data(), address.size(), nullptr, 0,
              NI_NUMERICHOST);
  freeaddrinfo(found);
  return address.data();
}

// The values that the ranks gave, shared by the threads that serve the other ranks and by rank 0
// itself.
class Meeting {
 public:
  // All ranks wait until the one deadline, and so give one reason.
  Meeting(int world_size, Clock::time_point deadline)
      : world_size_(world_size), deadline_(deadline) {}

  absl::Status Join(int rank, int world_size) {
    MutexLock lock(mutex_);
    const absl::Status status = CheckRank(rank, world_size);
    if (status.ok()) {
      joined_.insert(rank);
    } else {
      refusals_.insert(std::string(status.message()));
    }
    return status;
  }

  // The rank's stream ended: no later round is complete.
  void Leave(int rank) {
    MutexLock lock(mutex_);
    // It stays in `joined_`: if it joined again, it would have missed rounds.
    ended_.insert(rank);
    changed_.NotifyAll();
  }

  void Close() {
    MutexLock lock(mutex_);
    closed_ = true;
    changed_.NotifyAll();
  }

  absl::StatusOr<std::vector<std::string>> Exchange(int round, int rank, std::string value) {
    if (round >= Rendezvous::kMaxRounds) return absl::ResourceExhaustedError("too many rounds");
    MutexLock lock(mutex_);
    // Rounds are kept: a rank may be in the next one while a thread still waits in this one. A
    // std::map does not move its elements, so `values` is valid after the waits.
    std::map<int, std::string>& values = rounds_[round];
    values[rank] = std::move(value);
    changed_.NotifyAll();
    Clock::time_point patience = Clock::now() + kPatience;
    // A complete round counts even if a rank has ended since.
    while (values.size() < static_cast<size_t>(world_size_)) {
      const Clock::time_point now = Clock::now();
      if (now >= deadline_) return absl::DeadlineExceededError(TooLate(values));
      if (closed_) return absl::CancelledError("rank 0 ended");
      if (!ended_.empty()) {
        return absl::UnavailableError(
            absl::StrCat("rank ", *ended_.begin(), " ended; see its error"));
      }
      if (now >= patience) {
        patience = Clock::time_point::max();
        // Rank 0's own call says it; the threads of other ranks wait for the same ones.
        if (rank == 0) {
          std::fprintf(stderr, "ballast-worker: rank 0: waiting for %s\n", Missing(values).c_str());
        }
      }
      changed_.WaitUntil(mutex_, std::min(deadline_, patience));
    }
    std::vector<std::string> all;
    for (const auto& [from, given] : values) all.push_back(given);
    return all;
  }

 private:
  absl::Status CheckRank(int rank, int world_size) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (world_size != world_size_) {
      return absl::InvalidArgumentError(absl::StrCat(
          "rank ", rank, " was started with WORLD_SIZE=", world_size, " but rank 0 with ",
          world_size_, "; start all workers with the same WORLD_SIZE"));
    }
    if (rank < 1 || rank >= world_size_) {
      return absl::InvalidArgumentError(
          absl::StrCat("RANK=", rank, " must be between 1 and ", world_size_ - 1));
    }
    if (joined_.contains(rank)) {
      return absl::AlreadyExistsError(
          absl::StrCat("two workers were started with RANK=", rank, "; give each its own"));
    }
    return absl::OkStatus();
  }

  // "rank 2", or "rank 2 and 5 more".
  std::string Missing(const std::map<int, std::string>& values) const {
    int first = 0;
    while (values.contains(first)) ++first;
    const size_t more = world_size_ - values.size() - 1;
    return absl::StrCat("rank ", first, more > 0 ? absl::StrCat(" and ", more, " more") : "");
  }
  std::string TooLate(const std::map<int, std::string>& values)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    std::string text = absl::StrCat(Missing(values), " did not arrive in time; start ", world_size_,
                                    " workers with the same MASTER_ADDR and MASTER_PORT");
    for (const std::string& refusal : refusals_) absl::StrAppend(&text, "; refused: ", refusal);
    return text;
  }

  const int world_size_;
  const Clock::time_point deadline_;
  Mutex mutex_;
  CondVar changed_;
  std::map<int, std::map<int, std::string>> rounds_ ABSL_GUARDED_BY(mutex_);  // By round and rank.
  std::set<int> joined_ ABSL_GUARDED_BY(mutex_);
  std::set<int> ended_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> refusals_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

class ServedRendezvous final : public Rendezvous, private v1::Rendezvous::Service {
 public:
  explicit ServedRendezvous(const RendezvousOptions& options)
      : options_(options), meeting_(options.world_size, Clock::now() + options.timeout) {}

  ~ServedRendezvous() override {
    // First: a thread that waits in a round does not notice that its call is cancelled, and
    // Shutdown waits for it.
    meeting_.Close();
    // The grace is for answers that are on their way.
    if (server_ != nullptr) {
      server_->Shutdown(proto::Deadline(absl::Seconds(1)));
    }
  }

  absl::Status Listen() {
    BALLAST_ASSIGN_OR_RETURN(std::string address, Resolve(options_.host));
    // Debian maps a host's own name to 127.0.1.1, which no other host reaches.
    if (IsLoopback(address) && options_.host != address && options_.host != "localhost") {
      address = "0.0.0.0";
    }
    grpc::ServerBuilder builder;
    builder.SetMaxReceiveMessageSize(kMaxValueBytes);
    // More than there are ranks, so that one that is refused does not take another's place.
    builder.SetResourceQuota(
        grpc::ResourceQuota("rendezvous").SetMaxThreads(2 * options_.world_size + 8));
    // A port that another process listens on is an error, and not shared with it.
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.AddListeningPort(HostAndPort(address, options_.port), grpc::InsecureServerCredentials(),
                             &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    if (server_ != nullptr) return absl::OkStatus();
    return absl::UnavailableError(absl::StrCat("rank 0: cannot listen on ",
                                               HostAndPort(options_.host, options_.port),
                                               "; choose another MASTER_PORT"));
  }

  absl::StatusOr<std::vector<std::string>> Exchange(const std::string& value) override {
    absl::StatusOr<std::vector<std::string>> all = meeting_.Exchange(round_++, /*rank=*/0, value);
    if (!all.ok()) return Annotate(all.status(), "rank 0");
    return all;
  }
  int port() const override { return port_; }

 private:
  using Stream = grpc::ServerReaderWriter<v1::MeetReply, v1::MeetRequest>;

  grpc::Status Meet(grpc::ServerContext* context, Stream* stream) override {
    return proto::ToGrpc(Serve(*context, *stream));
  }

  // On a thread of gRPC's for each rank, until the rank ends.
  absl::Status Serve(const grpc::ServerContext& context, Stream& stream) {
    v1::MeetRequest request;
    // The peer ended before it said which rank it is.
    if (!stream.Read(&request)) return absl::OkStatus();
    const int rank = request.rank();
    BALLAST_RETURN_IF_ERROR(meeting_.Join(rank, request.world_size()));
    // Only from here on: a rank that was refused must not end the rounds of the others.
    const absl::Cleanup leave = [&] { meeting_.Leave(rank); };
    v1::MeetReply reply;
    reply.set_host(HostOf(context.peer()));
    for (int round = 0; stream.Write(reply) && stream.Read(&request); ++round) {
      BALLAST_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                               meeting_.Exchange(round, rank, request.value()));
      *reply.mutable_values() = {all.begin(), all.end()};
    }
    return absl::OkStatus();
  }

  const RendezvousOptions options_;
  Meeting meeting_;
  int round_ = 0;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;  // Last: its threads use the others.
};

class JoinedRendezvous final : public Rendezvous {
 public:
  explicit JoinedRendezvous(const RendezvousOptions& options) : options_(options) {}

  ~JoinedRendezvous() override {
    if (stream_ == nullptr) return;
    // Finish waits for the end of the stream, and rank 0 waits there for this rank's next value.
    context_.TryCancel();
    stream_->Finish();
  }

  absl::Status Join() {
    BALLAST_RETURN_IF_ERROR(Connect());
    // Longer than rank 0 waits for the others, so that its reason arrives.
    context_.set_deadline(proto::Deadline(absl::FromChrono(options_.timeout + kForTheAnswer)));
    stub_ = v1::Rendezvous::NewStub(channel_);
    stream_ = stub_->Meet(&context_);
    absl::StatusOr<v1::MeetReply> welcome = Ask({});
    if (!welcome.ok()) return Annotate(welcome.status(), "refused by rank 0");
    connected_from_ = welcome->host();
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<std::string>> Exchange(const std::string& value) override {
    absl::StatusOr<v1::MeetReply> reply = Ask(value);
    if (!reply.ok()) {
      return Annotate(reply.status(), absl::StrCat("rank ", options_.rank, ": from rank 0"));
    }
    return std::vector<std::string>(reply->values().begin(), reply->values().end());
  }
  int port() const override { return options_.port; }

 private:
  absl::Status Connect() {
    BALLAST_ASSIGN_OR_RETURN(connected_to_, Resolve(options_.host));
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);  // Every rank's value.
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kFirstReconnectMs);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kLastReconnectMs);
    // No proxy that the environment names, and no connection or pause that is shared with another
    // channel of this process.
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    channel_ = grpc::CreateCustomChannel(HostAndPort(connected_to_, options_.port),
                                         grpc::InsecureChannelCredentials(), arguments);
    const auto connected_within = [&](Clock::duration limit) {
      return channel_->WaitForConnected(proto::Deadline(absl::FromChrono(limit)));
    };
    if (connected_within(std::min<Clock::duration>(kPatience, options_.timeout))) {
      return absl::OkStatus();
    }
    const std::string address = HostAndPort(options_.host, options_.port);
    if (options_.timeout > kPatience) {
      std::fprintf(stderr, "ballast-worker: rank %d: waiting for rank 0 at %s\n", options_.rank,
                   address.c_str());
      if (connected_within(options_.timeout - kPatience)) return absl::OkStatus();
    }
    return absl::DeadlineExceededError(
        absl::StrCat("cannot reach rank 0 at ", address,
                     "; start it with the same MASTER_ADDR and MASTER_PORT"));
  }

  absl::StatusOr<v1::MeetReply> Ask(const std::string& value) {
    if (!failure_.ok()) return failure_;
    v1::MeetRequest request;
    request.set_rank(options_.rank);
    request.set_world_size(options_.world_size);
    request.set_value(value);
    v1::MeetReply reply;
    if (stream_->Write(request) && stream_->Read(&reply)) return reply;
    // A stream is finished once; later calls return what it said then.
    failure_ = proto::FromGrpc(stream_->Finish());
    if (failure_.ok()) failure_ = absl::UnavailableError("rank 0 ended");
    stream_ = nullptr;
    return failure_;
  }

  const RendezvousOptions options_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Rendezvous::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::MeetRequest, v1::MeetReply>> stream_;
  absl::Status failure_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Rendezvous>> Rendezvous::Open(const RendezvousOptions& options) {
  if (options.rank == 0) {
    auto served = std::make_unique<ServedRendezvous>(options);
    BALLAST_RETURN_IF_ERROR(served->Listen());
    return served;
  }
  auto joined = std::make_unique<JoinedRendezvous>(options);
  BALLAST_RETURN_IF_ERROR(Annotate(joined->Join(), absl::StrCat("rank ", options.rank)));
  return joined;
}

absl::StatusOr<std::string> Rendezvous::OwnHost() {
  BALLAST_ASSIGN_OR_RETURN(const std::vector<std::string> reached, Exchange(connected_to_));
  if (!connected_from_.empty() && !IsLoopback(connected_from_)) return connected_from_;
  // This is the host of rank 0: the address that ranks on other hosts reach, if there are any.
  for (const std::string& host : reached) {
    if (!host.empty() && !IsLoopback(host)) return host;
  }
  // All ranks are on one host, and reach each other by its loopback address.
  return reached.back();
}

}  // namespace ballast::worker
