#include "gpu_worker/collective/launch.h"

#include <gloo/rendezvous/hash_store.h>

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/collective/gloo_collective.h"
#include "gpu_worker/collective/rendezvous.h"
#include "gpu_worker/collective/single_collective.h"

namespace ballast::worker {
namespace {

// A store with the keys of all ranks. Each rank sets the same number of keys, and one set is one
// round of the rendezvous. Gloo reports errors by exception; ConnectGloo catches them.
class ExchangedStore final : public gloo::rendezvous::HashStore {
 public:
  explicit ExchangedStore(Rendezvous& rendezvous) : rendezvous_(rendezvous) {}

  void set(const std::string& key, const std::vector<char>& data) override {
    const absl::StatusOr<std::vector<std::string>> all =
        rendezvous_.Exchange(absl::StrCat(key, "\n", absl::string_view(data.data(), data.size())));
    if (!all.ok()) throw std::runtime_error(std::string(all.status().message()));
    // Now all ranks' values are here, and Gloo finds them without waiting. A key has no line end;
    // the data after it may have any byte.
    for (const std::string& pair : *all) {
      const size_t end = pair.find('\n');
      HashStore::set(pair.substr(0, end), {pair.begin() + end + 1, pair.end()});
    }
  }

 private:
  Rendezvous& rendezvous_;
};

}  // namespace

absl::StatusOr<Launch> ReadLaunch(
    const std::function<std::optional<std::string>(const std::string&)>& variable) {
  Launch launch;
  int local_rank = -1;
  struct Number {
    const char* name;
    int* value;
    int least;
    int most;
  };
  // That RANK is less than WORLD_SIZE is checked below, when both are known.
  for (const Number& number : {Number{"WORLD_SIZE", &launch.world_size, 1, kMaxWorldSize},
                               Number{"RANK", &launch.rank, 0, kMaxWorldSize - 1},
                               Number{"LOCAL_RANK", &local_rank, 0, kMaxWorldSize - 1},
                               Number{"MASTER_PORT", &launch.master_port, 1, 65535}}) {
    const std::optional<std::string> text = variable(number.name);
    if (!text.has_value()) continue;
    if (!absl::SimpleAtoi(*text, number.value) || *number.value < number.least ||
        *number.value > number.most) {
      return absl::InvalidArgumentError(absl::StrCat(number.name, "=", *text,
                                                     " must be a number between ", number.least,
                                                     " and ", number.most));
    }
  }
  if (launch.rank >= launch.world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("RANK=", launch.rank, " must be less than WORLD_SIZE=", launch.world_size));
  }
  launch.local_rank = local_rank < 0 ? launch.rank : local_rank;
  if (std::optional<std::string> host = variable("MASTER_ADDR")) launch.master_host = *host;
  return launch;
}

absl::StatusOr<Launch> ReadLaunch() {
  return ReadLaunch([](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    if (value == nullptr || *value == '\0') return std::nullopt;
    return value;
  });
}

absl::StatusOr<Workers> ConnectWorkers(const Launch& launch, std::chrono::milliseconds timeout) {
  if (launch.world_size == 1) return Workers{.collective = std::make_unique<SingleCollective>()};
  BALLAST_ASSIGN_OR_RETURN(const std::unique_ptr<Rendezvous> rendezvous,
                           Rendezvous::Open({.rank = launch.rank,
                                             .world_size = launch.world_size,
                                             .host = launch.master_host,
                                             .port = launch.master_port,
                                             .timeout = timeout}));
  Workers workers;
  BALLAST_ASSIGN_OR_RETURN(workers.own_host, rendezvous->OwnHost());
  ExchangedStore store(*rendezvous);
  // The rendezvous ends when this returns, and ConnectGloo returns when no rank needs it any more.
  BALLAST_ASSIGN_OR_RETURN(workers.collective, ConnectGloo({.rank = launch.rank,
                                                            .world_size = launch.world_size,
                                                            .host = workers.own_host,
                                                            .connect_timeout = timeout,
                                                            .timeout = timeout},
                                                           store));
  return workers;
}

}  // namespace ballast::worker
