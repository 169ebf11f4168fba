#include "tests/bench/wire/wire_peer.h"

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "cpu_optimizer_service/common/status.h"
#include "server/transport_settings.h"
#include "tests/bench/wire/raw_socket.h"
#include "tests/bench/wire/wire.h"
#include "tests/bench/wire/wire_service.h"

namespace ballast::bench {
namespace {

// Serves one transfer; false when the other end is done.
absl::StatusOr<bool> ServeTransfer(int fd, const SendMemory& memory) {
  std::byte first[sizeof(TransferSizes)];
  BALLAST_ASSIGN_OR_RETURN(const bool there, ReceiveAll(fd, absl::MakeSpan(first)));
  if (!there) return false;
  TransferSizes sizes;
  std::memcpy(&sizes, first, sizeof(sizes));
  if (sizes.buffer_bytes > 0) SetBuffers(fd, static_cast<int>(sizes.buffer_bytes));
  absl::Status sent;
  std::thread sender;
  if (sizes.up > 0 && sizes.down > 0) {
    sender = std::thread([&] { sent = SendMessages(fd, memory, sizes.down); });
  } else {
    sent = SendMessages(fd, memory, sizes.down);
  }
  const absl::Status received = ReceiveMessages(fd, sizes.up);
  if (sender.joinable()) sender.join();
  BALLAST_RETURN_IF_ERROR(received);
  BALLAST_RETURN_IF_ERROR(sent);
  BALLAST_RETURN_IF_ERROR(SendAll(fd, absl::MakeConstSpan(&kTransferDone, 1)));
  return true;
}

void ServeRaw(int listener, const SendMemory& memory) {
  for (;;) {
    const absl::StatusOr<int> fd = AcceptRaw(listener);
    if (!fd.ok()) return;
    for (;;) {
      const absl::StatusOr<bool> more = ServeTransfer(*fd, memory);
      if (!more.ok() || !*more) break;
    }
    close(*fd);
  }
}

// Writes the four addresses to `fd` and serves until this process is killed.
absl::Status RunPeer(const std::string& folder, int fd) {
  server::ConfigureProcessForTransport();
  const SendMemory memory;
  WireService service(memory);
  const std::string grpc_unix = absl::StrCat("unix:", folder, "/grpc");
  const std::string raw_unix = absl::StrCat("unix:", folder, "/raw");
  int port = 0;
  grpc::ServerBuilder builder;
  server::ConfigureTransport(builder, int64_t{8} << 30);
  builder.RegisterService(&service);
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.AddListeningPort(grpc_unix, grpc::InsecureServerCredentials());
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) return absl::UnavailableError("the gRPC server did not start");

  BALLAST_ASSIGN_OR_RETURN(const int tcp, ListenRaw("127.0.0.1:0"));
  BALLAST_ASSIGN_OR_RETURN(const int local, ListenRaw(raw_unix));
  BALLAST_ASSIGN_OR_RETURN(const std::string raw_tcp, AddressOfRaw(tcp));
  std::thread serve_tcp([&] { ServeRaw(tcp, memory); });
  std::thread serve_local([&] { ServeRaw(local, memory); });
  const std::string line =
      absl::StrCat(raw_tcp, " ", raw_unix, " 127.0.0.1:", port, " ", grpc_unix, "\n");
  if (write(fd, line.data(), line.size()) != static_cast<ssize_t>(line.size())) std::abort();
  close(fd);
  serve_tcp.join();
  serve_local.join();
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<WirePeer>> WirePeer::Start() {
  std::string folder = (std::filesystem::temp_directory_path() / "wire-bench.XXXXXX").string();
  int ends[2];
  if (mkdtemp(folder.data()) == nullptr || pipe(ends) != 0) {
    return absl::ErrnoToStatus(errno, "cannot prepare the peer");
  }
  std::unique_ptr<WirePeer> self(new WirePeer(folder));
  const pid_t parent = getpid();
  self->pid_ = fork();
  if (self->pid_ < 0) return absl::ErrnoToStatus(errno, "cannot start the peer");
  if (self->pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // It ends with its parent, however that ends.
    if (getppid() != parent) _exit(1);
    close(ends[0]);
    const absl::Status status = RunPeer(folder, ends[1]);
    std::fprintf(stderr, "wire_bench: peer: %s\n", status.ToString().c_str());
    _exit(1);
  }
  close(ends[1]);
  const absl::Status status = self->ReadAddresses(ends[0]);
  close(ends[0]);
  BALLAST_RETURN_IF_ERROR(status);
  return self;
}

absl::Status WirePeer::ReadAddresses(int fd) {
  std::string line;
  char c = 0;
  while (line.size() < 4096 && read(fd, &c, 1) == 1 && c != '\n') line.push_back(c);
  const std::vector<std::string> words = absl::StrSplit(line, ' ');
  if (words.size() != 4 || c != '\n') return absl::UnavailableError("the peer did not start");
  addresses_ = {
      .raw_tcp = words[0], .raw_unix = words[1], .grpc_tcp = words[2], .grpc_unix = words[3]};
  return absl::OkStatus();
}

WirePeer::~WirePeer() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

}  // namespace ballast::bench
