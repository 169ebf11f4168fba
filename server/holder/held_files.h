// The child's end of the holder (holder.h): what it keeps for this process.
#ifndef BALLAST_SERVER_HOLDER_HELD_FILES_H_
#define BALLAST_SERVER_HOLDER_HELD_FILES_H_

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "absl/status/statusor.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/host/file_keeper.h"

namespace ballast::server {

struct HolderTable;

class HeldFiles final : public FileKeeper {
 public:
  // The holder of this child process; null: no holder. Call it once, before the process has other
  // threads: it removes the holder's variable from the environment. INTERNAL: the variable is not a
  // holder's. FAILED_PRECONDITION: the holder's protocol differs.
  static absl::StatusOr<std::unique_ptr<HeldFiles>> OfHolder();

  absl::Status Keep(const std::string& name, int descriptor) override;
  void Drop(const std::string& name) override;
  std::map<std::string, FileDescriptor> TakeKept() override;
  // The format of the kept jobs, from the last process that served; 0: there was none.
  uint32_t state_format() const { return state_format_; }
  // This process replaces one that had not crashed.
  bool is_upgrade() const { return is_upgrade_; }
  // Crashed processes before this one, since the holder started.
  uint64_t deaths() const { return deaths_; }
  // The remaining jobs are served again, and kept in `state_format`. An end before that counts as
  // another crash in a row.
  void Ready(uint32_t state_format);
  // Whether the holder has passed on signals since the last call. The signal itself does not show
  // that: while one of its number is pending, the kernel drops further ones with their senders.
  bool TakeStop();
  // The service continues although it was asked to stop.
  void StopRefused();
  // Its clients know that it is about to be replaced.
  void SaidFarewell();
  // For a program on trial (trial.h).
  void CanTakeOver();

 private:
  struct Unmap {
    void operator()(const HolderTable* table) const;
  };
  using Table = std::unique_ptr<const HolderTable, Unmap>;
  HeldFiles(FileDescriptor socket, Table table, std::map<std::string, FileDescriptor> kept);

  const FileDescriptor socket_;
  const Table table_;
  const uint32_t state_format_;
  const bool is_upgrade_;
  const uint64_t deaths_;
  uint32_t stops_ = 0;  // At TakeStop's last call.
  Mutex mutex_;
  std::set<std::string> held_ ABSL_GUARDED_BY(mutex_);  // Names.
  std::map<std::string, FileDescriptor> kept_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_HOLDER_HELD_FILES_H_
