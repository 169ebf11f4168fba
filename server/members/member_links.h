// The links of all jobs that are led here to their other members: opened, opened again when they
// end, and given up when the job ends.
#ifndef BALLAST_SERVER_MEMBERS_MEMBER_LINKS_H_
#define BALLAST_SERVER_MEMBERS_MEMBER_LINKS_H_

#include <grpcpp/security/credentials.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cpu_optimizer_service/common/system/helper_threads.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/common/system/periodic_thread.h"
#include "cpu_optimizer_service/engine.h"

namespace ballast::server {

class MemberLinks final : public MemberDialer {
 public:
  using Credentials = absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>>;

  // For all members that are not reached by a unix socket.
  explicit MemberLinks(Credentials credentials) : credentials_(std::move(credentials)) {}
  ~MemberLinks() override { Stop(); }
  // Ends all links, and waits for their ends. Later calls do nothing.
  void Stop();

  void Dial(std::shared_ptr<Job> job) override;
  void HangUp(const Job& job) override;

 private:
  class Link;

  // Opens links that are due, and ends those that take too long to end.
  void Look();

  const Credentials credentials_;
  Mutex mutex_;
  std::map<std::string, std::vector<std::shared_ptr<Link>>> links_
      ABSL_GUARDED_BY(mutex_);  // By uid.
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::shared_ptr<Link>> ending_ ABSL_GUARDED_BY(mutex_);
  HelperThreads threads_{2};                                        // They write.
  std::unique_ptr<PeriodicThread> thread_ ABSL_GUARDED_BY(mutex_);  // From the first job on.
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_MEMBERS_MEMBER_LINKS_H_
