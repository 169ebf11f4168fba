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
  // Of the holder whose child this process is; null: of none. Once, before there are other threads:
  // what the holder has left in the environment goes. INTERNAL: that is not a holder's.
  // FAILED_PRECONDITION: of one that speaks otherwise.
  static absl::StatusOr<std::unique_ptr<HeldFiles>> OfHolder();

  absl::Status Keep(const std::string& name, int descriptor) override;
  void Drop(const std::string& name) override;
  std::map<std::string, FileDescriptor> TakeKept() override;
  // What jobs are kept in, as the process said that served last; 0: there was none.
  uint32_t state_format() const { return state_format_; }
  // This process takes the place of one that had not died.
  bool is_upgrade() const { return is_upgrade_; }
  // Of this process's predecessors, since the holder started.
  uint64_t deaths() const { return deaths_; }
  // The jobs that were left are served again, and kept in `state_format`. An end before that counts
  // as another one of a row.
  void Ready(uint32_t state_format);
  // Whether the holder has passed on signals since the last call, however many. The signal does not
  // show that: while one of its number is pending, the kernel drops it with its sender.
  bool TakeStop();
  // It goes on, although it was asked to stop.
  void StopRefused();
  // Its clients know that it is about to be replaced.
  void SaidFarewell();
  // Of a program that is tried (trial.h).
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
  uint32_t stops_ = 0;  // Of TakeStop's last call.
  Mutex mutex_;
  std::set<std::string> held_ ABSL_GUARDED_BY(mutex_);  // Names.
  std::map<std::string, FileDescriptor> kept_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_HOLDER_HELD_FILES_H_
